//! Arguments, good and bad.

use super::*;
use proc_macro2::TokenStream;
use quote::quote;

fn parse(tokens: TokenStream) -> syn::Result<Args> {
    syn::parse2(tokens)
}

fn errors(tokens: TokenStream) -> Vec<String> {
    parse(tokens).err().unwrap().into_iter().map(|error| error.to_string()).collect()
}

#[test]
fn every_argument_is_read() {
    let args = parse(quote!(
        key = "a",
        lease = "10s",
        wait = "1m 30s",
        reentrant,
        permits = 3,
        min_hold = "1s",
        max_hold = limit(),
        client = self.locks,
    ))
    .unwrap();
    assert!(matches!(args.key, Key::Template(_)));
    assert!(matches!(args.lease, Some(Value::Literal(lease)) if lease == Duration::from_secs(10)));
    assert!(matches!(args.wait, Some(Wait::AtMost(Value::Literal(wait))) if wait == Duration::from_secs(90)));
    assert!(matches!(args.mode, Mode::Permits(Value::Literal(permits)) if permits.get() == 3));
    assert!(matches!(args.min_hold, Some(Value::Literal(_))));
    assert!(matches!(args.max_hold, Some(Value::Expr(_))));
    assert!(args.reentrant && args.client.is_some());
}

#[test]
fn a_key_alone_leaves_everything_open() {
    let args = parse(quote!(key = order.key())).unwrap();
    assert!(matches!(args.key, Key::Expr(_)));
    assert!(args.lease.is_none() && args.wait.is_none() && args.client.is_none() && !args.reentrant);
    assert!(matches!(args.mode, Mode::Exclusive));
}

#[test]
fn read_write_and_no_wait_are_flags() {
    assert!(matches!(parse(quote!(key = "a", read)).unwrap().mode, Mode::Shared));
    let args = parse(quote!(key = "a", write, no_wait)).unwrap();
    assert!(matches!((args.mode, args.wait), (Mode::Exclusive, Some(Wait::No))));
}

#[test]
fn each_mistake_says_what_to_write() {
    for (tokens, advice) in [
        (quote!(), "write `key ="),
        (quote!("order:{id}"), "write `key = \"order:{id}\"`"),
        (quote!(key), "write `key = \"order:{id}\"`"),
        (quote!(key = , no_wait), "write `key = \"order:{id}\"`"),
        (quote!(key = "a", key = "b"), "`key` is given twice"),
        (quote!(key = "a", lease = "soon"), "\"30s\""),
        (quote!(key = "a", lease = "30"), "time unit needed"),
        (quote!(key = "a", lease = 30), "write `lease = \"30s\"`"),
        (quote!(key = "a", lease("30s")), "write `lease = \"30s\"`"),
        (quote!(key = "a", lease = "99ms"), "100ms to 24h"),
        (quote!(key = "a", lease = "25h"), "100ms to 24h"),
        (quote!(key = "a", wait = "25h"), "at most 24h"),
        (quote!(key = "a", min_hold = "2 days"), "at most 24h"),
        (quote!(key = "a", max_hold = "0s"), "leave it out"),
        (quote!(key = "a", max_hold = "1s", min_hold = "2s"), "swap them"),
        (quote!(key = "a", wait = "1s", no_wait), "keep `wait = \"2s\"`"),
        (quote!(key = "a", no_wait, wait = "1s"), "keep `wait = \"2s\"`"),
        (quote!(key = "a", read, write), "`read` and `write` exclude each other"),
        (quote!(key = "a", write, permits = 2), "`write` and `permits` exclude each other"),
        (quote!(key = "a", permits = 0), "write 1 or more"),
        (quote!(key = "a", permits = 4294967296), "at most 4294967295"),
        (quote!(key = "a", permits = "3"), "write `permits = 3`"),
        (quote!(key = "a", reentrant = true), "write `reentrant` alone"),
        (quote!(key = "a", leese = "3s"), "did you mean `lease`?"),
        (quote!(key = "a", ttl = "3s"), "did you mean `lease`?"),
        (quote!(key = "a", nowait), "did you mean `no_wait`?"),
        (quote!(key = "a", fn), "the arguments are: key, lease"),
        (quote!(key = "a" lease = "3s"), "expected `,`"),
    ] {
        let source = tokens.to_string();
        let errors = errors(tokens);
        assert_eq!(errors.len(), 1, "{source}: {errors:?}");
        assert!(errors[0].contains(advice), "{source}: {}", errors[0]);
    }
}

#[test]
fn a_word_that_resembles_nothing_gets_no_guess() {
    let errors = errors(quote!(key = "a", colour = "red"));
    assert!(!errors[0].contains("did you mean"), "{}", errors[0]);
}

#[test]
fn all_mistakes_are_shown_at_once() {
    let errors = errors(quote!(lease = "1ms", colour = f(a, b), wait = "1s", no_wait));
    assert_eq!(errors.len(), 4, "{errors:?}");
}
