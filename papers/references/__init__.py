"""How near methods are to the true posterior: HMC references, gap splits, tables against other tools."""
