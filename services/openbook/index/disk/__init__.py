"""What lies on disk: snapshots, their passages, and the record of what is published."""
