//! Tests of valid and invalid keys.

use super::*;
use quote::quote;

fn text(text: &str) -> Part<'_> {
    Part::Text(text.into())
}

fn hole<'a>(name: &'a str, spec: &'a str) -> Part<'a> {
    Part::Hole { name, spec }
}

fn call(tokens: TokenStream) -> syn::Result<Key> {
    Key::from_call.parse2(tokens)
}

fn expanded(key: syn::Result<Key>) -> String {
    key.unwrap()
        .expand(&Runtime::new(Some(syn::parse_quote!(app))))
        .to_string()
        .replace(' ', "")
}

fn refused(key: syn::Result<Key>) -> String {
    key.err().unwrap().to_string()
}

#[test]
fn a_format_string_is_split_as_std_does() {
    for (source, parts) in [
        ("order", vec![text("order")]),
        ("order:{id}", vec![text("order:"), hole("id", "")]),
        ("{a}{b:>08.3}", vec![hole("a", ""), hole("b", ":>08.3")]),
        ("{a:?}/{}", vec![hole("a", ":?"), text("/"), hole("", "")]),
        (
            "{{{tag}}}:{id }",
            vec![text("{"), hole("tag", ""), text("}:"), hole("id", "")],
        ),
        ("{{x}}", vec![text("{x}")]),
        (
            "{a:}>4}}}{b:{^9}",
            vec![hole("a", ":}>4"), text("}"), hole("b", ":{^9")],
        ),
        ("{a:$<4}{b:→^}", vec![hole("a", ":$<4"), hole("b", ":→^")]),
    ] {
        assert_eq!(split(source).unwrap(), parts, "{source}");
    }
}

#[test]
fn a_broken_format_string_is_refused() {
    for (source, reason) in [
        ("order:{id", "not closed"),
        ("order:{", "not closed"),
        ("order:{a{b}}", "not closed"),
        ("order:id}", "no `{`"),
        ("{id:width$}", "write the number"),
        ("{id:.*}", "write the number"),
        ("{id:04q}", "an unknown format, `q`"),
        ("{id:$>width$}", "write the number"),
        ("{id:}>x", "write `{id}`"),
        ("{id:}>{to}", "write `{id}`"),
        ("{ id:04}", "write `{id:04}`"),
    ] {
        let error = split(source).unwrap_err();
        assert!(error.contains(reason), "{source}: {error}");
    }
}

#[test]
fn text_and_values_are_written_apart() {
    assert_eq!(
        expanded(Key::from_value(syn::parse_quote!("order:{id:>4}/x"))),
        r#"__lock_rt::key(|__k|{__k.lit("order:").arg(::core::format_args!("{id:>4}")).lit("/x");})"#
    );
}

#[test]
fn an_argument_is_evaluated_once_however_often_it_is_written() {
    assert_eq!(
        expanded(call(quote!("{0}:{}:{n:?}:{id}", next(), n = b))),
        r#"match(&(next()),&(b),){(__a0,__a1,)=>__lock_rt::key(|__k|{__k.arg(::core::format_args!("{}",__a0)).lit(":").arg(::core::format_args!("{}",__a0)).lit(":").arg(::core::format_args!("{:?}",__a1)).lit(":").arg(::core::format_args!("{id}"));})}"#
    );
}

#[test]
fn a_raw_name_is_known_by_its_word() {
    assert_eq!(
        expanded(call(quote!("{type}", r#type = 1))),
        r#"match(&(1),){(__a0,)=>__lock_rt::key(|__k|{__k.arg(::core::format_args!("{}",__a0));})}"#
    );
}

#[test]
fn anything_but_a_literal_is_an_expression() {
    for (key, call) in [
        (syn::parse_quote!(order.key()), "key_from(order.key())"),
        (
            syn::parse_quote!(format!("order:{id}")),
            "format!(\"order:{id}\")",
        ),
        (
            syn::parse_quote!(render("order:{id}", id)),
            "render(\"order:{id}\",id)",
        ),
        (syn::parse_quote!(KEYS["orders"]), "KEYS[\"orders\"]"),
    ] {
        let text = expanded(Key::from_value(key));
        assert!(text.contains(call.trim_start_matches("key_from")), "{text}");
    }
}

#[test]
fn text_in_disguise_is_refused() {
    for key in [
        quote!(("order:{id}")),
        quote!({ "order:{id}" }),
        quote!(&"order:{id}"),
        quote!(*&"order:{id}"),
        quote!("order:{id}".to_owned()),
        quote!("order:{id}".to_string().as_str()),
        quote!(String::from("order:{id}")),
        quote!(LockKey::new("orders")?),
        quote!(LockKey::new("orders").unwrap()),
        quote!(concat!("order:", "{id}")),
    ] {
        let error = refused(syn::parse2(key.clone()).and_then(Key::from_value));
        assert!(
            error.contains("write `key = \"order:{id}\"`"),
            "{key}: {error}"
        );
        let several = syn::parse2(quote!([a.key(), #key])).and_then(Keys::from_value);
        assert!(
            several.is_err_and(|error| error.to_string().contains("write `keys(")),
            "{key}"
        );
    }
    for keys in [
        quote!(["a"]),
        quote!(&["a"]),
        quote!(vec!["a:{id}", b]),
        quote!(["a"; 2]),
        quote!(["a"].iter()),
    ] {
        assert!(
            syn::parse2(keys.clone())
                .and_then(Keys::from_value)
                .is_err(),
            "{keys}"
        );
    }
    for keys in [
        quote!([a, b]),
        quote!(vec![a.key()]),
        quote!(ids.map(|id| format!("order:{id}"))),
    ] {
        assert!(
            syn::parse2(keys.clone()).and_then(Keys::from_value).is_ok(),
            "{keys}"
        );
    }
}

#[test]
fn a_placeholder_without_a_value_gets_both_remedies() {
    let error = refused(Key::from_value(syn::parse_quote!("order:{}")));
    assert!(error.contains("`key(\"order:{}\", value)`"), "{error}");
    let error = refused(Key::from_value(syn::parse_quote!("order:{order.id:>4}")));
    assert!(
        error.contains("`key(\"order:{:>4}\", order.id)`"),
        "{error}"
    );
    assert!(
        refused(Key::from_value(syn::parse_quote!("{r#type}")))
            .contains("without `r#`: write `{type}`")
    );
}

#[test]
fn values_and_placeholders_must_match() {
    for (tokens, reason) in [
        (quote!("{}:{}", a), "more placeholders than values (1)"),
        (quote!("{1}", a), "more placeholders than values (1)"),
        (quote!("{}"), "more placeholders than values (0)"),
        (quote!("{}", a, b), "does not use this argument: write `{}`"),
        (
            quote!("{a}", a = 1, b = 2),
            "does not use this argument: write `{b}`",
        ),
        (quote!("{a}", a = 1, a = 2), "given twice"),
        (quote!("{a}", a = 1, r#a = 2), "given twice"),
        (quote!("{a}", a = 1, r#type = 2), "write `{type}`"),
        (quote!("{a}{}", a = 1, 2), "come first"),
        (quote!("{_}", _ = 1), "names nothing"),
        (quote!(id), "begins with a format string"),
        (quote!(), "begins with a format string"),
    ] {
        let error = refused(call(tokens));
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_key_that_the_runtime_would_refuse_does_not_compile() {
    let long = "x".repeat(513);
    for (text, reason) in [
        ("", "empty"),
        ("a\nb", "control"),
        ("x}}", "hash tag"),
        ("permits:{id}", "reserved"),
        (long.as_str(), "512"),
    ] {
        let error = refused(Key::from_value(syn::parse_quote!(#text)));
        assert!(error.contains(reason), "{error}");
    }
    assert!(Key::from_value(syn::parse_quote!("{{orders}}:{id}")).is_ok());
    assert!(Key::from_value(syn::parse_quote!("{{{shop}}}:{id}")).is_ok());
    assert!(Key::from_value(syn::parse_quote!(42)).is_err());
}
