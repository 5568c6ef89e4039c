//! The map of a cluster, and redirections.

use super::slots::{Address, Redirection, SLOTS, Slots};
use crate::{
    fuzz::{is_readable, within_bounds},
    store::redis::fuzz::values,
};

#[test]
fn nodes() {
    bolero::check!().for_each(|input: &[u8]| {
        let values = values(input);
        within_bounds(input, || {
            let asked = Address::new("asked", 1);
            for value in values {
                match Redirection::parse(&value, &asked) {
                    Some(Redirection::Moved(slot, node)) => {
                        assert!(slot < SLOTS);
                        is_readable(&node);
                    }
                    Some(Redirection::Ask(node)) => is_readable(&node),
                    _ => {}
                }
                let Some(slots) = Slots::parse(&value, &asked) else {
                    continue;
                };
                slots.members.iter().for_each(is_readable);
                let (owners, mut all) = (slots.owners(), 0..SLOTS);
                assert!(all.all(|slot| slots.owner(slot).is_none_or(|it| owners.contains(it))));
                assert!(slots.agrees_with(&slots));
            }
        });
    });
}
