//! All that is shown: log, metrics, activity, health and texts.

pub(crate) mod activity;
#[cfg(feature = "serde")]
pub(crate) mod fields;
pub(crate) mod health;
pub mod log;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod text;
pub(crate) mod watch;
