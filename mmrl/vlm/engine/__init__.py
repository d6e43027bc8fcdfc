"""Sampling and scoring with the prompt computed once per group: sampler, decoder, kept prefixes, packed rows."""
