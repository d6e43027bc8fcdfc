"""Methods of single papers for language and vision-language models."""
