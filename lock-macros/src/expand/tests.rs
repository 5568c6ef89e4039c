//! What is emitted, and what is said of mistakes in the function.

use super::*;

/// Tokens as they are compared: without what the printer puts between them.
fn squeezed(tokens: &TokenStream) -> String {
    tokens.to_string().split_whitespace().collect()
}

fn expanded(args: TokenStream, item: TokenStream) -> String {
    let tokens = expand(args, item);
    let text = squeezed(&tokens);
    assert!(!text.contains("compile_error"), "{tokens}");
    text
}

#[test]
fn the_expansion_of_one_function() {
    let function = quote! {
        /// Pays.
        pub async fn pay(order_id: u64) -> Result<Receipt, PayError> { charge(order_id).await }
    };
    let expected = quote! {
        /// Pays.
        pub async fn pay(order_id: u64) -> Result<Receipt, PayError> {
            let __client = ::lock_runtime::__rt::ambient();
            let __key = ::lock_runtime::__rt::key(26usize, |__k| {
                __k.lit("order:").arg(::core::format_args!("{order_id}"));
            });
            let __spec = const {
                &::lock_runtime::__rt::LockSpec::exclusive()
                    .lease(::core::time::Duration::new(30u64, 0u32))
                    .reentrant()
            };
            let __outcome = match ::lock_runtime::__rt::enter(__client, __key, __spec).await {
                ::core::result::Result::Ok(__entered) => {
                    __entered.cancel_on_loss(async move {
                        #[allow(
                            unreachable_code,
                            clippy::diverging_sub_expression,
                            clippy::empty_loop,
                            clippy::let_unit_value,
                            clippy::let_with_type_underscore,
                            clippy::needless_return,
                        )]
                        if false {
                            let __returned: Result<Receipt, PayError> = loop {};
                            return __returned;
                        }
                        { charge(order_id).await }
                    }).await
                }
                ::core::result::Result::Err(__error) => ::core::result::Result::Err(__error),
            };
            match __outcome {
                ::core::result::Result::Ok(__returned) => __returned,
                ::core::result::Result::Err(__error) => ::lock_runtime::__rt::FromLockError::from_lock_error(__error),
            }
        }
    };
    assert_eq!(expanded(quote!(key = "order:{order_id}", lease = "30s", reentrant), function), squeezed(&expected));
}

#[test]
fn a_spec_with_an_expression_is_built_at_every_call() {
    let function = quote!(
        async fn f(&self) -> Res<()> {}
    );
    let text = expanded(quote!(key = "a", lease = self.lease, permits = 3, client = self.locks), function);
    assert!(text.contains("let__spec=&::lock_runtime::__rt::LockSpec::permits(::core::num::NonZeroU32::MIN"), "{text}");
    assert!(text.contains("saturating_add(2u32)).lease(self.lease);"), "{text}");
    assert!(text.contains("let__client=::lock_runtime::__rt::client(&(self.locks));"), "{text}");
}

#[test]
fn impl_trait_is_inferred_in_the_body() {
    let text = expanded(
        quote!(key = "a"),
        quote!(
            async fn f() -> Res<Vec<impl Display>> {}
        ),
    );
    assert!(text.contains("let__returned:Res<Vec<_>>=loop{};"), "{text}");
}

#[test]
fn a_half_typed_body_is_kept_as_it_is() {
    let text = expanded(quote!(key = "a"), quote!(async fn f() -> Res<()> { #![allow(unused)] let x = order. }));
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
            quote!(key = "a"),
            quote!(
                pub(crate) fn f() {}
            ),
            "write `async fn f`",
        ),
        (
            quote!(key = "a"),
            quote!(
                const unsafe extern "C" fn f() {}
            ),
            "make it an `async fn`",
        ),
        (
            quote!(key = "a"),
            quote!(
                fn f() -> Pin<Box<dyn Future<Output = ()>>> {}
            ),
            "async_trait",
        ),
        (
            quote!(key = "a"),
            quote!(
                async fn f() -> ! {}
            ),
            "Infallible",
        ),
        (
            quote!(key = "a"),
            quote!(
                async fn f(&self);
            ),
            "no body",
        ),
        (
            quote!(key = "a"),
            quote!(
                pub struct S {
                    f: fn(),
                }
            ),
            "goes on an `async fn`",
        ),
        (quote!(key = "a"), quote!(impl S { async fn f() {} }), "goes on an `async fn`"),
        (quote!(key = "a"), quote!(unsafe impl S {}), "goes on an `async fn`"),
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
    ] {
        let tokens = expand(args, item.clone()).to_string();
        assert!(tokens.starts_with(&item.to_string()), "{tokens}");
        assert!(tokens.contains("compile_error") && tokens.contains(advice), "{tokens}");
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
        expanded(quote!(key = "{SHOP}:{id}"), item);
    }
    expanded(
        quote!(key = "{self}"),
        quote!(
            async fn f(&self) -> Res<()> {}
        ),
    );
    expanded(
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
}
