"""The switches with their cards, by what they change."""
