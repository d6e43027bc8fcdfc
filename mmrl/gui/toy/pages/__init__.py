"""Generated web pages, drawn by Chromium, with the true boxes of their controls."""
