"""WIRE: frozen messages, every subject, the codec. One file per producer."""
