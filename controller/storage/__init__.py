"""The object store: one protocol, a folder and S3 behind it."""
