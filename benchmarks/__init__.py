"""Measurements that a person can rerun: `python -m benchmarks.NAME`, a table, then one line of JSON."""
