"""Management API: a table of endpoints (`endpoints`), and one file of handlers a topic."""
