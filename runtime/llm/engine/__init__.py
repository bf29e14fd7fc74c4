"""Scheduler, blocks, sampler, step loop."""
