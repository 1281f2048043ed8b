"""Options of texts: lengths, prompt forms and chat templates."""
