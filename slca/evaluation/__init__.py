"""Suites that score a policy, one file each, and the metrics they share."""
