"""The object store: one protocol with two implementations, a folder and S3."""
