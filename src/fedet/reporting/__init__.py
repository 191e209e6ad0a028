"""Reading runs back: tables, plots, HTML reports."""
