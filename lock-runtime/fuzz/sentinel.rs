//! The answers of a Sentinel.

use super::{SentinelAnswer, answer};
use crate::{
    fuzz::{is_readable, within_bounds},
    store::redis::fuzz::values,
};

#[test]
fn answers() {
    bolero::check!().for_each(|input: &[u8]| {
        let values = values(input);
        within_bounds(input, || match answer(values) {
            SentinelAnswer::Named(primary) => is_readable(&primary),
            SentinelAnswer::Failed(error) => is_readable(&error),
            SentinelAnswer::Unknown => {}
        });
    });
}
