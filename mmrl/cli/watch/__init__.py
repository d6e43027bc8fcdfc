"""`mmrl watch`: a page on this machine, or a terminal, that follows runs while they write their folders."""
