"""What tokens receive: measure, tables, words."""
