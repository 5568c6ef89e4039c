//! Tests of the expansion, and of the errors for invalid functions.

use super::*;

/// Compares the expansion with the reviewed snapshot, `snapshots/..__NAME.snap`.
fn assert_reviewed(name: &str, args: TokenStream, item: TokenStream) {
    let tokens = expand(args, item);
    let file = syn::parse2(tokens.clone()).unwrap_or_else(|error| panic!("{error}: {tokens}"));
    let text = prettyplease::unparse(&file);
    assert!(!text.contains("compile_error"), "{text}");
    insta::with_settings!({ omit_expression => true }, { insta::assert_snapshot!(name, text) });
}

/// Returns the tokens without whitespace.
fn squeezed(args: TokenStream, item: TokenStream) -> String {
    let text = expand(args, item).to_string();
    assert!(!text.contains("compile_error"), "{text}");
    text.split_whitespace().collect()
}

#[test]
fn a_function() {
    assert_reviewed(
        "a_function",
        quote!(key = "order:{order_id}", lease = "30s", reentrant),
        quote! {
            /// Pays.
            #[must_use]
            pub async fn pay(order_id: u64) -> Result<Receipt, PayError> {
                charge(order_id).await
            }
        },
    );
}

#[test]
fn a_function_that_runs_once() {
    assert_reviewed(
        "a_function_that_runs_once",
        quote!(key = "report:{day}", once = "48h", held = lock),
        quote! {
            async fn report(day: Day) -> Result<Report, ReportError> {
                write(day, lock.fence()).await
            }
        },
    );
}

#[test]
fn a_method_with_values_that_are_not_known_while_compiling() {
    assert_reviewed(
        "a_method_with_values_that_are_not_known_while_compiling",
        quote!(
            key("order:{}:{id}", self.shop),
            client = self.locks,
            spec = self.config.lock,
            lease = self.lease,
            wait = "1m 30s",
            held = lock,
            crate = crate::locks,
        ),
        quote! {
            async fn pay<'a>(&'a mut self, id: u64) -> io::Result<impl Display + use<'a>> {
                Ok(lock.fence())
            }
        },
    );
}

#[test]
fn a_job_that_others_may_be_at() {
    assert_reviewed(
        "a_job_that_others_may_be_at",
        quote!(
            keys("job:{name}", key("shard:{}", shard.id), shard.key()),
            permits = 3,
            no_wait,
            strict_order,
            no_renew,
            min_hold = "5s",
            max_hold = LIMIT,
            on_busy = skip,
            on_lost = ignore,
            map_err = report,
        ),
        quote! {
            async fn tidy(name: &str, shard: Shard) {
                #![allow(unused)]
                shard.tidy(name).await;
            }
        },
    );
}

#[test]
fn a_method_of_async_trait() {
    // The expansion by async-trait 0.1.92.
    assert_reviewed(
        "a_method_of_async_trait",
        quote!(key = "order:{id}", on_busy = Err(Busy)),
        quote! {
            fn pay<'life0, 'async_trait>(
                &'life0 self,
                __arg1: Path<u64>,
            ) -> ::core::pin::Pin<
                Box<dyn ::core::future::Future<Output = Result<u64, PayError>> + ::core::marker::Send + 'async_trait>,
            >
            where
                'life0: 'async_trait,
                Self: 'async_trait,
            {
                Box::pin(async move {
                    if let ::core::option::Option::Some(__ret) = ::core::option::Option::None::<Result<u64, PayError>> {
                        #[allow(unreachable_code)]
                        return __ret;
                    }
                    let __self = self;
                    let Path(id) = { let __arg1 = __arg1; __arg1 };
                    let __ret: Result<u64, PayError> = { __self.charge(id).await };
                    #[allow(unreachable_code)]
                    __ret
                })
            }
        },
    );
}

#[test]
fn a_guard_may_be_called_as_the_expansion_calls_its_own() {
    let text = squeezed(
        quote!(key = k, held = __entered),
        quote!(
            async fn f() -> Res {}
        ),
    );
    assert!(text.contains("let__held=__entered.held();"), "{text}");
    assert!(
        text.contains("let__entered:&::lock_runtime::__rt::HeldLock=&__held;"),
        "{text}"
    );
}

#[test]
fn impl_trait_is_inferred_in_the_body() {
    let text = squeezed(
        quote!(key = k),
        quote!(
            async fn f() -> Res<Vec<impl Display>> {}
        ),
    );
    assert!(
        text.contains("return(||->Res<Vec<_>>{loop{}})();"),
        "{text}"
    );
}

#[test]
fn a_half_typed_body_is_kept_as_it_is() {
    let text = squeezed(
        quote!(key = k),
        quote!(async fn f() -> Res<()> { #![allow(unused)] let x = order. }),
    );
    assert!(text.contains("{#![allow(unused)]let__client="), "{text}");
    assert!(text.contains("{letx=order.}"), "{text}");
}

#[test]
fn an_item_with_a_mistake_stands_beside_the_error() {
    for (args, item, advice) in [
        (
            quote!(),
            quote!(
                async fn f() {}
            ),
            "a lock needs a key",
        ),
        (
            quote!(key = k),
            quote!(
                pub(crate) fn f() {}
            ),
            "write `async fn f`",
        ),
        (
            quote!(key = k),
            quote!(
                fn f() {
                    async move {}
                }
            ),
            "write `async fn f`",
        ),
        (
            quote!(key = k),
            quote!(
                const unsafe extern "C" fn f() {}
            ),
            "make it an `async fn`",
        ),
        (
            quote!(key = k),
            quote!(
                fn f() -> Pin<Box<dyn Future<Output = ()>>> {}
            ),
            "whole body",
        ),
        (
            quote!(key = k),
            quote!(
                fn f() -> impl Future<Output = Res> {
                    async {}
                }
            ),
            "write `async move",
        ),
        (
            quote!(key = k),
            quote!(
                async fn f() -> ! {}
            ),
            "Infallible",
        ),
        (
            quote!(key = k),
            quote!(
                async fn f(&self);
            ),
            "no body",
        ),
        (
            quote!(key = k),
            quote!(
                pub struct S {
                    f: fn(),
                }
            ),
            "goes on an `async fn`",
        ),
        (
            quote!(key = k),
            quote!(impl S { async fn f() {} }),
            "goes on an `async fn`",
        ),
        (
            quote!(key = k),
            quote!(unsafe impl S {}),
            "goes on an `async fn`",
        ),
        (
            quote!(key = "{ordr}"),
            quote!(
                async fn f(Path(order): Path<u64>) {}
            ),
            "did you mean `{order}`?",
        ),
        (
            quote!(key = "{order}"),
            quote!(
                async fn f() {}
            ),
            "has no argument `order`",
        ),
        (
            quote!(key = k),
            quote!(
                async fn f() {}
            ),
            "`f` returns nothing",
        ),
        (
            quote!(key = k, on_busy = skip),
            quote!(
                async fn f() -> () {}
            ),
            "`f` returns nothing",
        ),
        (
            quote!(key = k),
            quote!(
                fn f() -> Pin<Box<dyn Future<Output = ()>>> {
                    Box::pin(async move {})
                }
            ),
            "`f` returns nothing",
        ),
        (
            quote!(key = k, held = order),
            quote!(
                async fn f(order: u64) -> Res<()> {}
            ),
            "hides the argument `order`",
        ),
        (
            quote!(key = k),
            quote!(
                fn main() {
                    Runtime::new().block_on(async {})
                }
            ),
            "put `#[distributed_lock]` above that one",
        ),
    ] {
        let tokens = expand(args, item.clone()).to_string();
        assert!(tokens.contains(&item.to_string()), "{tokens}");
        assert!(
            tokens.contains("compile_error") && tokens.contains(advice),
            "{tokens}"
        );
    }
}

#[test]
fn a_key_may_name_what_a_pattern_binds_and_constants() {
    for item in [
        quote!(
            async fn f(Path((id, _)): Path<(u64, u64)>) -> Res<()> {}
        ),
        quote!(
            async fn f(Order { id, .. }: Order) -> Res<()> {}
        ),
        quote!(
            async fn f(mut id: u64) -> Res<()> {}
        ),
        quote!(
            async fn f(binding!(): u64) -> Res<()> {}
        ),
    ] {
        squeezed(quote!(key = "{SHOP}:{id}"), item);
    }
    squeezed(
        quote!(key = "{self}"),
        quote!(
            async fn f(&self) -> Res<()> {}
        ),
    );
    squeezed(
        quote!(key = "{type}"),
        quote!(
            async fn f(r#type: u8) -> Res<()> {}
        ),
    );
}

#[test]
fn mistakes_in_arguments_and_function_are_shown_together() {
    let tokens = expand(
        quote!(lease = "30s"),
        quote!(
            fn f() {}
        ),
    )
    .to_string();
    assert_eq!(tokens.matches("compile_error").count(), 2, "{tokens}");
    let tokens = expand(
        quote!(key = "{a}:{b}:{c}", held = c),
        quote!(
            async fn f(c: u64) {}
        ),
    )
    .to_string();
    assert_eq!(tokens.matches("compile_error").count(), 4, "{tokens}");
}

#[test]
fn a_closure_does_not_stand_beside_the_error() {
    let tokens = expand(quote!(key = k), quote!(async |id: u64| {})).to_string();
    assert!(
        tokens.contains("goes on an `async fn`") && !tokens.contains("id"),
        "{tokens}"
    );
}

#[test]
fn what_follows_a_closure_of_map_err_is_of_the_declared_type() {
    let item = quote!(
        async fn f() -> Res<impl Display> {}
    );
    let text = squeezed(
        quote!(key = k, map_err = |error| explain(error)),
        item.clone(),
    );
    assert!(
        text.contains(
            "__value:Res<_>=::lock_runtime::__rt::map_err::<Res<_>>(|error|explain(error),__error)"
        ),
        "{text}"
    );
    let text = squeezed(quote!(key = k, map_err = explain), item);
    assert!(
        text.contains("::lock_runtime::__rt::map_err(explain,__error)"),
        "{text}"
    );
}
