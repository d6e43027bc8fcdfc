"""Vision-language-action policies and their training; `robotics` exports what users import."""
