//! The answers of a Sentinel.

use super::{Answer, answer};
use crate::{
    fuzz::{is_readable, within_bounds},
    store::redis::fuzz::values,
};

#[test]
fn answers() {
    bolero::check!().for_each(|input: &[u8]| {
        let values = values(input);
        within_bounds(input, || match answer(values) {
            Answer::Named(primary) => is_readable(&primary),
            Answer::Failed(error) => is_readable(&error),
            Answer::Unknown => {}
        });
    });
}
