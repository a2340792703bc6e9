"""What generates and checks README and the guide: tables and figures from recorded measurements."""
