"""Studies: many runs from one plan, their records, and the tables, figures and documents made from them."""
