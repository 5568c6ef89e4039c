//! Tests of valid and invalid arguments.

use super::*;
use proc_macro2::TokenStream;
use quote::quote;

fn parse(tokens: TokenStream) -> syn::Result<Args> {
    syn::parse2(tokens)
}

fn errors(tokens: TokenStream) -> Vec<String> {
    parse(tokens)
        .err()
        .unwrap()
        .into_iter()
        .map(|error| error.to_string())
        .collect()
}

fn text(tokens: impl quote::ToTokens) -> String {
    tokens.to_token_stream().to_string().replace(' ', "")
}

/// Returns the options in their order, with their values.
fn options(spec: &Spec) -> Vec<String> {
    let shown = |(name, setting): &(Ident, Setting)| {
        let value = match setting {
            Setting::Flag => return name.to_string(),
            Setting::Duration(Value::Literal(duration)) => {
                humantime::format_duration(*duration).to_string()
            }
            Setting::Count(Value::Literal(count)) => count.to_string(),
            Setting::OnLost(Value::Literal(variant)) => (*variant).to_owned(),
            Setting::Duration(Value::Expr(given))
            | Setting::Count(Value::Expr(given))
            | Setting::OnLost(Value::Expr(given)) => text(&given.expr),
        };
        format!("{name}={}", value.replace(' ', ""))
    };
    spec.options.iter().map(shown).collect()
}

#[test]
fn every_argument_is_read() {
    let args = parse(quote!(
        key = "a",
        global,
        lease = "10s",
        wait = "1m 30s",
        reentrant,
        strict_order,
        no_renew,
        permits = 3,
        min_hold = "1s",
        max_hold = limit(),
        retain = "50ms",
        max_waiters = 100,
        client = self.locks,
        held = lock,
        on_busy = Ok(None),
        on_lost = ignore,
        map_err = |error| error.code(),
        crate = app::locks,
    ))
    .unwrap();
    let spec = args.spec;
    assert!(matches!(args.keys, Keys::One(Key::Template(_))));
    assert!(matches!(spec.base, Base::Permits(Value::Literal(permits)) if permits.get() == 3));
    assert_eq!(
        options(&spec),
        [
            "lease=10s",
            "wait=1m30s",
            "reentrant",
            "strict_order",
            "no_renew",
            "min_hold=1s",
            "max_hold=limit()",
            "retain=50ms",
            "max_waiters=100",
            "on_lost=Ignore",
        ]
    );
    assert!(text(args.client.unwrap().expr) == "self.locks" && args.held.unwrap() == "lock");
    assert!(matches!(args.on_busy, Some(OnBusy::Return(value)) if text(&value) == "Ok(None)"));
    assert!(matches!(args.map_err, Some(Expr::Closure(_))));
    assert_eq!(text(args.runtime), "app::locks");
}

#[test]
fn a_key_alone_leaves_everything_open() {
    let Args {
        keys,
        client,
        spec,
        once,
        held,
        on_busy,
        map_err,
        runtime,
        name,
    } = parse(quote!(key = order.key())).unwrap();
    assert!(matches!(keys, Keys::One(Key::Expr(_))));
    assert!(
        client.is_none()
            && once.is_none()
            && held.is_none()
            && on_busy.is_none()
            && map_err.is_none()
            && runtime.is_none()
            && name.is_none()
    );
    let Spec { base, options } = spec;
    assert!(matches!(base, Base::Exclusive));
    assert!(options.is_empty());
}

#[test]
fn keys_are_strings_calls_and_expressions_or_one_list() {
    let args = parse(quote!(keys(
        "a:{from}",
        key("a:{}", to.id),
        to.key(),
        other::key(1)
    )))
    .unwrap();
    let Keys::Several(keys) = args.keys else {
        panic!("not several")
    };
    let templates: Vec<_> = keys.iter().map(|key| key.template().is_some()).collect();
    assert_eq!(templates, [true, true, false, false]);
    assert!(matches!(
        parse(quote!(keys = cart.keys())).unwrap().keys,
        Keys::Expr(_)
    ));
}

#[test]
fn modes_and_words_are_known() {
    for (mode, expected) in [(quote!(exclusive), "exclusive"), (quote!(shared), "shared")] {
        let base = match parse(quote!(key = k, #mode)).unwrap().spec.base {
            Base::Exclusive => "exclusive",
            Base::Shared => "shared",
            Base::Permits(_) | Base::Expr(_) => "another",
        };
        assert_eq!(base, expected, "{mode}");
    }
    let spec = parse(quote!(key = k, exclusive, no_wait)).unwrap().spec;
    assert_eq!(options(&spec), ["no_wait"]);
    let spec = parse(quote!(key = k, spec = CHECKOUT, wait = "1s"))
        .unwrap()
        .spec;
    assert_eq!(options(&spec), ["wait=1s"]);
    assert!(matches!(spec.base, Base::Expr(base) if text(&base.expr) == "CHECKOUT"));
    assert!(matches!(
        parse(quote!(key = k, on_busy = skip)).unwrap().on_busy,
        Some(OnBusy::Skip(_))
    ));
    assert!(matches!(
        parse(quote!(key = k, on_busy = (skip))).unwrap().on_busy,
        Some(OnBusy::Return(_))
    ));
    for (value, option) in [
        (quote!(cancel), "on_lost=Cancel"),
        (quote!(error), "on_lost=Error"),
        (quote!(self.on_lost), "on_lost=self.on_lost"),
    ] {
        let spec = parse(quote!(key = k, on_lost = #value)).unwrap().spec;
        assert_eq!(options(&spec), [option]);
    }
}

#[test]
fn only_a_key_without_placeholders_has_to_say_that_it_is_global() {
    for tokens in [
        quote!(key = "jobs", global),
        quote!(global, key = "jobs"),
        quote!(key = "job:{id}"),
        quote!(key = "job:{KIND}"),
        quote!(key("job:{}", id)),
        quote!(key = JOBS),
        quote!(key = JOBS, global),
        quote!(keys("jobs", "job:{id}"), global),
    ] {
        assert!(parse(tokens.clone()).is_ok(), "{tokens}");
    }
    for tokens in [
        quote!(key = "jobs"),
        quote!(key("jobs")),
        quote!(key = "{{jobs}}"),
        quote!(keys("job:{id}", "jobs")),
        quote!(key = "job:{id}", global),
        quote!(keys("job:{a}", "job:{b}"), global),
    ] {
        assert!(errors(tokens.clone())[0].contains("global"), "{tokens}");
    }
}

#[test]
fn each_mistake_says_what_to_write() {
    for (tokens, advice) in [
        (quote!(), "write `key ="),
        (quote!("order:{id}"), "write `key = \"order:{id}\"`"),
        (quote!(key), "write `key = \"order:{id}\"`"),
        (quote!(key = , no_wait), "write `key = \"order:{id}\"`"),
        (quote!(key = k, key = j), "`key` is given twice"),
        (quote!(key = k, lease = "soon"), "\"30s\""),
        (quote!(key = k, lease = "30"), "write \"30s\" for seconds"),
        (
            quote!(key = k, lease = "1 m 30 "),
            "write \"1 m 30s\" for seconds",
        ),
        (
            quote!(key = k, lease = "3 moons"),
            "\"moons\" is not a unit of time: write ms, s, m, h or d",
        ),
        (quote!(key = k, lease = ""), "such as \"30s\""),
        (quote!(key = k, lease = 30), "write `lease = \"30s\"`"),
        (quote!(key = k, lease("30s")), "write `lease = \"30s\"`"),
        (quote!(key = k, lease = "99ms"), "100ms to 24h"),
        (quote!(key = k, lease = "25h"), "100ms to 24h"),
        (quote!(key = k, wait = "25h"), "at most 24h"),
        (quote!(key = k, min_hold = "2 days"), "at most 24h"),
        (quote!(key = k, max_hold = "0s"), "leave it out"),
        (
            quote!(key = k, max_hold = "1s", min_hold = "2s"),
            "swap them",
        ),
        (
            quote!(key = k, wait = "1s", no_wait),
            "keep `wait = \"2s\"`",
        ),
        (
            quote!(key = k, no_wait, wait = "1s"),
            "keep `wait = \"2s\"`",
        ),
        (
            quote!(key = k, renew, no_renew),
            "`renew` and `no_renew` exclude each other",
        ),
        (
            quote!(key = k, no_reentrant, reentrant),
            "`no_reentrant` and `reentrant` exclude each other",
        ),
        (
            quote!(key = k, shared, exclusive),
            "`shared` and `exclusive` exclude each other",
        ),
        (
            quote!(key = k, exclusive, permits = 2),
            "`exclusive` and `permits` exclude each other",
        ),
        (quote!(key = k, once = "999ms"), "1s to 366days"),
        (quote!(key = k, once = "367d"), "1s to 366days"),
        (quote!(key = k, once), "write `once = \"30s\"`"),
        (quote!(keys("a:{b}"), once = "1h"), "write `key = ..`"),
        (quote!(keys = all(), once = "1h"), "write `key = ..`"),
        (quote!(key = k, shared, once = "1h"), "leave `shared`"),
        (quote!(key = k, permits = 2, once = "1h"), "leave `permits`"),
        (quote!(key = k, once = "1h", reentrant), "leave `reentrant`"),
        (quote!(key = k, once = "1h", min_hold = "1s"), "no meaning"),
        (quote!(key = k, permits = 0), "write 1 or more"),
        (quote!(key = k, permits = 4294967296), "at most 4294967295"),
        (quote!(key = k, permits = "3"), "write `permits = 3`"),
        (quote!(key = k, max_waiters), "write `max_waiters = 100`"),
        (
            quote!(key = k, max_waiters = "9"),
            "write `max_waiters = 100`",
        ),
        (
            quote!(key = k, max_waiters = -1),
            "write `max_waiters = 100`",
        ),
        (
            quote!(key = k, max_waiters = 18446744073709551616),
            "leave it out",
        ),
        (quote!(key = k, reentrant = true), "write `reentrant` alone"),
        (quote!(key = k, global = true), "write `global` alone"),
        (quote!(key = "jobs", global = true), "write `global` alone"),
        (
            quote!(key = k, keys = j),
            "`key` and `keys` exclude each other",
        ),
        (quote!(keys(), no_wait), "needs at least one"),
        (quote!(keys = "a"), "`key = ..` for a single one"),
        (quote!(keys("a:{}", a)), "`key(\"a:{}\", value)`"),
        (quote!(key = k, spec), "write `spec = self.config.lock`"),
        (quote!(key = k, spec = "read"), "`spec` names a `LockSpec`"),
        (quote!(key = k, client), "write `client = self.locks`"),
        (
            quote!(key = k, client = "redis://localhost"),
            "`client` names a `LockClient`",
        ),
        (
            quote!(key = k, spec = s, shared),
            "drop `spec` and keep `shared`",
        ),
        (
            quote!(key = k, exclusive, spec = s),
            "drop `spec` and keep `exclusive`",
        ),
        (quote!(key = k, held), "write `held = lock`"),
        (quote!(key = k, held = _), "write `held = lock`"),
        (quote!(key = k, held = "lock"), "write `held = lock`"),
        (quote!(key = k, held = a.b), "write `held = lock`"),
        (quote!(key = k, on_busy), "write `on_busy = skip`"),
        (quote!(key = k, on_lost = finish), "`on_lost = ignore`"),
        (quote!(key = k, on_lost = "error"), "`on_lost = error`"),
        (quote!(key = k, on_lost), "write `on_lost = error`"),
        (
            quote!(key = k, map_err),
            "write `map_err = PayError::from_lock`",
        ),
        (
            quote!(key = k, map_err = "f"),
            "write `map_err = PayError::from_lock`",
        ),
        (
            quote!(key = k, crate = "app::locks"),
            "write `crate = app::locks`",
        ),
        (
            quote!(key = k, crate = 3),
            "write `crate = my_crate::lock_runtime`",
        ),
        (quote!(key = k, skip), "did you mean `on_busy`?"),
        (quote!(key = k, leese = "3s"), "did you mean `lease`?"),
        (quote!(key = k, ttl = "3s"), "did you mean `lease`?"),
        (quote!(key = k, guard = lock), "did you mean `held`?"),
        (quote!(key = k, nowait), "did you mean `no_wait`?"),
        (quote!(key = k, read), "did you mean `shared`?"),
        (quote!(key = k, write), "did you mean `exclusive`?"),
        (quote!(key = k, fn = 3), "the arguments are key, keys"),
        (
            quote!(key = k, mode = "shared"),
            "there is no argument `mode`: write `shared`, without `mode`",
        ),
        (
            quote!(key = k, mode = exclusive),
            "write `exclusive`, without `mode`",
        ),
        (
            quote!(key = k, mode = "many"),
            "write `exclusive`, `shared` or `permits = n`, without `mode`",
        ),
        (quote!(key = k, id), "write `key(\"order:{}\", id)`"),
        (quote!(key = k, no - wait), "names are written with `_`"),
        (quote!(key = k, wait == "2s"), "write `wait = \"30s\"`"),
        (quote!(key = k, permits = -1), "write 1 or more"),
        (quote!(key = k, on_busy = "skip"), "write `on_busy = skip`"),
        (quote!(keys("a:{a}" "b:{b}")), "write a `,`"),
        (quote!(key("a:{}" a)), "write a `,`"),
        (
            quote!(key = k lease = "3s"),
            "write a `,` between two arguments",
        ),
    ] {
        let source = tokens.to_string();
        let errors = errors(tokens);
        assert_eq!(errors.len(), 1, "{source}: {errors:?}");
        assert!(errors[0].contains(advice), "{source}: {}", errors[0]);
    }
}

#[test]
fn a_word_that_resembles_nothing_gets_no_guess() {
    let errors = errors(quote!(key = k, colour = "red"));
    assert!(!errors[0].contains("did you mean"), "{}", errors[0]);
}

#[test]
fn a_guess_stands_alone() {
    let errors = errors(quote!(key = k, leese = "3s"));
    assert_eq!(
        errors,
        ["there is no argument `leese`: did you mean `lease`?"]
    );
}

#[test]
fn all_mistakes_are_shown_at_once() {
    let errors =
        errors(quote!(lease = "1ms", colour = f(a, b), reentrant read, wait = "1s", no_wait));
    assert_eq!(errors.len(), 5, "{errors:?}");
}

#[test]
fn parse_accepts_each_known_name() {
    for name in super::name::KNOWN {
        let name: TokenStream = name.parse().unwrap();
        for arguments in [quote!(#name), quote!(#name = 1)] {
            let errors = parse(quote!(key = k, #arguments)).err();
            let errors = errors.map_or(String::new(), |error| error.to_string());
            assert!(!errors.contains("there is no argument"), "{errors}");
        }
    }
}
