"""Object stores: `s3://`, `gs://` and `hf://`, opened by fsspec in a child process."""
