"""Files to arrays: one module per format, without knowledge of any one dataset."""
