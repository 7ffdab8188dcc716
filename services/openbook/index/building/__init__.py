"""Passages and vectors become a snapshot, with a certificate of its recall."""
