"""Byte sources: folder, S3 bucket, and the throttle of background reads."""
