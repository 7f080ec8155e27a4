"""Datasets, partitions, and batches made on the device."""
