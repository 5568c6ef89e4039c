//! Promises that need other servers than Redis. `tests/run.sh --stores` installs them.

mod fencing;
