"""Servers under load, measured by an existing client: guidellm."""
