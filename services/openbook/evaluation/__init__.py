"""What a system answers to questions whose answers are known: runs, tables and pictures."""
