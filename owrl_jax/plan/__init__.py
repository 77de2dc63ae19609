"""`owrl plan`: what an update takes on devices that are not here."""
