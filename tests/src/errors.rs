//! Errors as an error reporter prints them.

use std::{error::Error, iter};

/// The error and its sources in one line: `error: source: source`.
pub fn chain(error: &dyn Error) -> String {
    let sources = iter::successors(error.source(), |source| (*source).source());
    let sources: String = sources.map(|source| format!(": {source}")).collect();
    format!("{error}{sources}")
}
