"""Calls from function to function: workers' links, who may call whom, and the calls themselves."""
