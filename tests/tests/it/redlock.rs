//! Locks on several servers, of which a majority has to agree (DESIGN 11, PROTOCOL 28 to 31).

mod smoke;
