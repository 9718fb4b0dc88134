"""One folder per operation; installed as `lsfuse.kernels`. Callers use `lsfuse.kernels.<op>.api`."""
