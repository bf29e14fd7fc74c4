"""Where bytes come from: folder, S3."""
