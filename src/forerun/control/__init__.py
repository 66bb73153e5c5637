"""What decides how far each request is drafted: costs, acceptance, choices, trials."""
