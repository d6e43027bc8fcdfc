"""Agents in a browser: Chromium, pages, actions and web environments."""
