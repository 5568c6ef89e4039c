//! The URLs of clusters.

use super::settings::{EtcdOptions, Target};
use crate::fuzz::{SECRET, refused_readably, with_password, within_bounds};

#[test]
fn urls() {
    bolero::check!().for_each(|input: &[u8]| {
        let Some(url) = with_password("etcd://", input) else {
            return;
        };
        within_bounds(input, || {
            let target = Target::new(&url, &EtcdOptions::new());
            if let Err(error) = &target {
                let shown = format!("{error:?}");
                assert!(!shown.contains(SECRET), "{url:?}: {shown}");
            }
            refused_readably(target);
        });
    });
}
