"""Training a draft head for a target model: data written by the target itself, the objective, the trainer."""
