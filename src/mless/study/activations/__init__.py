"""Values behind the MLPs' non-linearities: measure, tables, words."""
