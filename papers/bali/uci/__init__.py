"""BALI on the UCI regression tables: its Tables 1 and 7, with the settings of its Table 4."""
