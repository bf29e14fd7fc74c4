"""Quantised copies of models (`fs weights quantize`)."""
