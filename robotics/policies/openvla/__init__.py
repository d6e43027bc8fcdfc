"""OpenVLA and OpenVLA-OFT policies."""
