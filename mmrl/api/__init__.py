"""Training from Python objects: `from mmrl import train`. It lies above all other packages, like the command line."""
