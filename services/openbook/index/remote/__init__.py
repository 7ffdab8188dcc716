"""Snapshots that lie elsewhere, under a URL: fetched by digest, and copied there."""
