"""Other tools' settings, translated into ours."""
