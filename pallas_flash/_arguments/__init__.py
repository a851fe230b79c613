"""Arguments become a problem; every error that a user can meet is raised here."""
