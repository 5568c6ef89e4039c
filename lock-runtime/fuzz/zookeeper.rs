//! The URLs of ensembles, what a server replies, and the names and contents of nodes.

use super::{
    jute::Reader,
    layout::{Content, Layout},
    settings::Target,
};
use crate::fuzz::{SECRET, refused_readably, with_password, within_bounds};

#[test]
fn urls() {
    bolero::check!().for_each(|input: &[u8]| {
        let Some(url) = with_password("zookeeper://", input) else {
            return;
        };
        within_bounds(input, || {
            let target = Target::new(&url);
            let shown = format!("{target:?}");
            assert!(!shown.contains(SECRET), "{url:?}: {shown}");
            refused_readably(target);
        });
    });
}

#[test]
fn replies() {
    bolero::check!().for_each(|input: &[u8]| {
        within_bounds(input, || {
            refused_readably(Reader(input).node());
            refused_readably(Reader(input).text());
            refused_readably(Reader(input).texts());
            refused_readably(Reader(input).multi());
            Content::of(input);
            Layout::name(&String::from_utf8_lossy(input));
        });
    });
}
