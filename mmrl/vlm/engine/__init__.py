"""Sampling and scoring with the prompt computed once a group: sampler, decoder, kept prefixes, packed rows."""
